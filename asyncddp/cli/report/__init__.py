"""Reading, summary and plots of the JSON lines that ``asyncddp.monitor`` has written."""
