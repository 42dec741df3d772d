"""`python -m yopo`, which torchrun needs."""

from yopo.cli import main

if __name__ == "__main__":
    main()
