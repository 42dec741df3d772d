"""How files of this repository are made."""
