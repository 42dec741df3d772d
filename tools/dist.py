"""Try what `make dist` has built: `python -m tools.dist dist`.

The wheel, which was built from the sdist, is the one that this folder gives. Installed into an
empty environment, it runs the demo's commands in an empty folder, for one epoch. And the README
that a package's page will show has no relative link.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = "runs/demo/natural runs/demo/pgd-10 runs/demo/yopo-3-5"
DEMO = (
    "yopo compare demo --methods natural,pgd-10,yopo-3-5 --epochs 1 --out runs/demo",
    f"yopo eval {RUNS} --attacks pgd-40,cw --samples 20",
    f"yopo report {RUNS} --out runs/demo/report.html",
)


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file in a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def description(wheel: Path) -> str:
    """The page that PyPI shows."""
    (metadata,) = (c for name, c in contents(wheel).items() if name.endswith("dist-info/METADATA"))
    return str(message_from_bytes(metadata).get_payload())


def relative_links(text: str) -> list[str]:
    """Links and pictures of Markdown, outside of code, that lead to no address."""
    plain = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return [to for to in re.findall(r"\]\(([^)]+)\)", plain) if not to.startswith("https://")]


def run(words: list[str], folder: Path, path: str | None = None) -> None:
    """A command, without this project's PYTHONPATH; its output is shown if it fails."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": f"{path}{os.pathsep}{env['PATH']}"} if path else {}
    print("+", shlex.join(words), flush=True)
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")


def main() -> None:
    """Try the one wheel in the folder."""
    (wheel,) = Path(sys.argv[1]).resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), "."], ROOT)
        if contents(next(folder.glob("*.whl"))) != contents(wheel):
            sys.exit("the sdist does not give the wheel that the project's folder gives")
        if relative := relative_links(description(wheel)):
            sys.exit(f"on the package's page these lead nowhere: {', '.join(relative)}")
        venv.create(folder / "empty", with_pip=True)
        bin_, place = folder / "empty" / "bin", folder / "elsewhere"
        place.mkdir()
        pip = [str(bin_ / "python"), "-m", "pip", "install", "--quiet"]
        run([*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[demo]"], place)
        for command in DEMO:
            first, *words = shlex.split(command)
            run([str(bin_ / first), *words], place, path=str(bin_))
        if not (place / "runs/demo/report.html").stat().st_size:
            sys.exit("the demo wrote no report")
    print(f"{wheel.name}: the demo ran in an empty environment")


if __name__ == "__main__":
    main()
