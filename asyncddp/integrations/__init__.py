"""Where other frameworks and tools meet this one; each file needs what it is named after."""
