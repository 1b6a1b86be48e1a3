"""The command line: ``aphoton pull``, ``generate``, ``chat``, ``bench``, ``trace``. One file per command.

A command imports what takes long (torch, matplotlib, transformers) when it runs, so that ``--help`` is quick. This
package imports nothing of itself: packages that bring commands of their own use its parts, and `app` loads those
packages.
"""
