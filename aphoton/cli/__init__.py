"""The command line: ``aphoton pull``, ``generate``, ``chat``, ``bench``, ``trace``. One file per command.

A command imports what takes long (torch, matplotlib, transformers) when it runs, so that ``--help`` is quick.
"""

from aphoton.cli.app import app, main

__all__ = ["app", "main"]
