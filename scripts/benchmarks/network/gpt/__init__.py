"""``network-gpt``: a GPT on hosts with slow links, to the perplexity of one process."""
