"""What the examples share and what would distract from them: data, tables, pictures."""
