"""`yopo completion`: what a shell needs to complete words."""

import argparse

from yopo.cli.common import loading, nothing_else

EXAMPLES = """examples:
  yopo completion bash > ~/.yopo.bash     then `source ~/.yopo.bash` in ~/.bashrc
  yopo completion zsh > ~/.yopo.zsh       then `source ~/.yopo.zsh` in ~/.zshrc, after compinit
  yopo completion fish > ~/.config/fish/completions/yopo.fish
Commands, their options, settings, recipes and files are completed."""

BASH = """_yopo() {
  local word=${COMP_WORDS[COMP_CWORD]} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="@commands@"
  else case ${COMP_WORDS[1]} in
@cases@
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
  [ "$COMP_CWORD" -eq 1 ] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o filenames -F _yopo yopo"""
ZSH = """_yopo() {
  if (( CURRENT == 2 )); then compadd @commands@; return; fi
  case ${words[2]} in
@cases@
  esac
  _files
}
compdef _yopo yopo"""


def options(parser: argparse.ArgumentParser) -> None:
    """For which shell."""
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def run(args: argparse.Namespace, rest: list[str]) -> None:
    """Print it."""
    nothing_else(args, rest)
    words, commands = vocabulary(), " ".join(vocabulary())
    if args.shell == "fish":
        print(f"complete -c yopo -n __fish_use_subcommand -f -a '{commands}'")
        for name, known in words.items():
            seen = f"__fish_seen_subcommand_from {name}"
            print(f"complete -c yopo -n '{seen}' -a '{' '.join(known)}'")
        return
    said = {"bash": 'words="{}"', "zsh": "compadd -- {}"}[args.shell]
    cases = (f"  {name}) {said.format(' '.join(known))};;" for name, known in words.items())
    text = {"bash": BASH, "zsh": ZSH}[args.shell]
    print(text.replace("@commands@", commands).replace("@cases@", "\n".join(cases)))


def vocabulary() -> dict[str, list[str]]:
    """The words that may follow each command."""
    from importlib import import_module

    from yopo.cli import COMMANDS
    from yopo.runs.recipes import RECIPES

    with loading():
        from yopo.runs.settings import fields

    settings = [f"--{name}" for name in dict.fromkeys(name for name, *_ in fields())]
    after = {}
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        import_module(f"yopo.cli.{name}").options(parser)
        words = list(RECIPES) if name in ("train", "compare") else []
        for action in parser._actions:
            words += [str(c) for c in action.choices or ()] if not action.option_strings else []
            own = [word for word in action.option_strings if word.startswith("--")]
            words += settings if any("SECTION" in word for word in own) else own
        after[name] = words
    return after
