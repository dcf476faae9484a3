"""`--install-completion [SHELL]` and `--show-completion [SHELL]`: TAB in bash, zsh and fish.

The scripts are ours because of two things that Typer's do not know: in bash `=` ends a word (COMP_WORDBREAKS), so
`method=ifc` arrives as three words and an answer must begin behind the `=`; and a name that is to be continued
(`local.lr=`) gets no blank. All three ask in the same way: an environment variable tells the program to answer with
one `value TAB description` per line, and Typer's completion finds the answer (its protocol for fish).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from archipelago.cli.app import Described
from archipelago.cli.request import Request
from archipelago.cli.words import refuse_surplus
from archipelago.core.errors import UserError
from archipelago.core.program import program
from archipelago.core.registry import closest, nearest

VARIABLE = "_ARCHIPELAGO_COMPLETE"

BASH = """\
# Completion of `archipelago` in bash.
_archipelago_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" word breaks="${COMP_WORDBREAKS//[^=:]/}" prefix answer
    word="${line##*[[:blank:]]}"
    # bash replaces what stands behind the last of these characters only.
    prefix=""
    [[ -n $breaks && $word == *[$breaks]* ]] && prefix="${word%"${word##*[$breaks]}"}"
    COMPREPLY=()
    while IFS= read -r answer; do
        answer="${answer%%$'\\t'*}"
        [[ -n $answer ]] && COMPREPLY+=("${answer#"$prefix"}")
    done < <(COLUMNS=200 VARIABLE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \\
                 _TYPER_COMPLETE_ARGS="$line" "$1" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _archipelago_completion archipelago
"""

ZSH = """\
#compdef archipelago
_archipelago_completion() {
    local line answer value
    local -a plain open plain_shown open_shown
    line="${(j: :)words[1,CURRENT]}"
    compset -P '--*='
    while IFS= read -r answer; do
        value="${answer%%$'\\t'*}"
        [[ -z $value ]] && continue
        if [[ $value == *[=./] ]]; then
            open+=("$value"); open_shown+=("${answer//$'\\t'/  }")
        else
            plain+=("$value"); plain_shown+=("${answer//$'\\t'/  }")
        fi
    done < <(COLUMNS=200 VARIABLE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \\
                 _TYPER_COMPLETE_ARGS="$line" $words[1] 2>/dev/null)
    if (( ${#plain} + ${#open} == 0 )); then
        _files
        return
    fi
    (( ${#plain} )) && compadd -l -d plain_shown -a plain
    (( ${#open} )) && compadd -l -S '' -d open_shown -a open
    return 0
}
if [[ $funcstack[1] == _archipelago ]]; then  # read by compinit when it is needed first
    _archipelago_completion
else
    compdef _archipelago_completion archipelago
fi
"""

FISH = """\
# Completion of `archipelago` in fish, which puts no blank behind `=`, `.` and `/`.
function __archipelago_complete
    set -lx COLUMNS 200
    set -lx VARIABLE complete_fish
    set -lx _TYPER_COMPLETE_FISH_ACTION $argv[1]
    set -lx _TYPER_COMPLETE_ARGS (commandline -cp)
    archipelago 2>/dev/null
end
complete --command archipelago --no-files --condition '__archipelago_complete is-args' \\
    --arguments '(__archipelago_complete get-args)'
"""

SCRIPTS = {name: text.replace("VARIABLE", VARIABLE) for name, text in
           {"bash": BASH, "zsh": ZSH, "fish": FISH}.items()}  # fmt: skip


@dataclass(kw_only=True)
class Completion(Request):
    """Print a shell's script, or put it where that shell finds it."""

    shell: str
    install: bool = False

    def execute(self) -> None:
        """Print or install."""
        if not self.install:
            print(SCRIPTS[self.shell], end="")
            return
        print(f"Completion for {self.shell} is in {install(self.shell)}. It works in a new shell.")


def install(shell: str) -> Path:
    """Write the script into the user's home, and have the shell read it; once, however often it is asked for."""
    home = Path.home()
    file = {
        "bash": home / ".bash_completions/archipelago.sh",
        "zsh": home / ".zfunc/_archipelago",
        "fish": home / ".config/fish/completions/archipelago.fish",
    }[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SCRIPTS[shell], encoding="utf-8")
    if shell == "bash":
        _add_line(home / ".bashrc", f"source '{file}'")
    if shell == "zsh":
        _add_line(home / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit")
    return file


def _add_line(file: Path, line: str) -> None:
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if line not in text.splitlines():
        file.write_text(
            f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n", encoding="utf-8"
        )


def completion(
    ctx: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="SHELL", help="bash, zsh or fish")] = None,
    install_completion: Annotated[bool, typer.Option("--install-completion")] = False,
    show_completion: Annotated[bool, typer.Option("--show-completion")] = False,
) -> Completion:
    """Complete commands, settings and names in the shell."""
    option = "--install-completion" if install_completion else "--show-completion"
    given = refuse_surplus(ctx, words, 1, f"{option} [SHELL]")
    if " " in program():
        raise UserError(
            f"Expected `archipelago {option}`, got `{program()} {option}`: shells complete the words behind a "
            "command, so install the package (pip install .) and use its command.",
            code="no-command", option=option,
        )  # fmt: skip
    shell = given[0] if given else _this_shell()
    if shell not in SCRIPTS:
        raise UserError(
            f"Expected a shell after {option}, got '{shell}'. {nearest(shell, SCRIPTS)}",
            code="unknown-name", kind="shell", name=shell, nearest=closest(shell, SCRIPTS),
        )  # fmt: skip
    return Completion(shell=shell, install=install_completion)


def _this_shell() -> str:
    """The shell that the program was started from."""
    import shellingham  # type: ignore[import-untyped]  # a package of Typer's, without types

    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        return Path(os.environ.get("SHELL", "")).name


COMMAND = Described("completion", completion, "[SHELL]", "", hidden=True)
