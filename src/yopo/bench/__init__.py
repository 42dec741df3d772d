"""What a step costs on this machine: ours beside the paper's loops written out plainly."""
