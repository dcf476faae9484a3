"""`python -m platform.launch`, from the project's root: the command line of `archipelago.cli`, and nothing else.

Nothing imports this module, and nothing defined here is sent to a Ray worker: there, the name `platform` may be
the standard module's (DECISIONS.md, A1). Where the package is installed, `archipelago` is the same command.
"""

from archipelago.cli.main import command_line

if __name__ == "__main__":
    command_line()
