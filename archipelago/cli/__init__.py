"""The command line: `archipelago ...`, and from the project's root `python -m platform.launch ...`."""
