"""Numbers as people write them."""


def fraction(value: float) -> str:
    """As 8/255, where it is a fraction of 255 and no short decimal; else as 0.3."""
    short, pixels = f"{value:.6g}", 255 * value
    whole = len(short) > 5 and round(pixels) != 0 and abs(pixels - round(pixels)) < 1e-6
    return f"{round(pixels)}/255" if whole else short
