"""`python -m archipelago`: the command line, also where the command `archipelago` is not on the path."""

from archipelago.cli.main import command_line

if __name__ == "__main__":
    command_line()
