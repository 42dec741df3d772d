"""The command `yopo`, and `python -m yopo`, which torchrun needs."""

import sys


def main() -> None:
    """Run the command line, if its packages are there; `import yopo` does without them."""
    try:
        from yopo import cli

        words = cli.parsed()
    except KeyboardInterrupt:  # nothing is begun yet
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("yopo", "torch"):
            raise
        sys.exit(
            f"yopo: the command line needs {error.name}, which is not installed; "
            "pip install 'yopo-torch[cli]', or '.[cli]' in its folder, brings all it needs"
        )
    cli.run(*words)


if __name__ == "__main__":
    main()
