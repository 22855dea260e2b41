"""``one-to-n``: the GPT of ``examples/gpt.py`` on one process and on many."""
