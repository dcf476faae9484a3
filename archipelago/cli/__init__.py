"""The command line: `archipelago ...`, and from the project's root `python -m platform.launch ...`.

One module per command. Typer reads the words and each command's function answers with a `Request`, which
`main` executes: parsing has no effects, and whatever a command raises reaches `main` unchanged. Heavy imports
(torch, Ray, Lightning, rich) stand inside the requests, so that help and mistakes are answered at once.
"""
