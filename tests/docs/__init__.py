"""README.md and docs/ are true: their code runs, their names exist, the site builds."""
