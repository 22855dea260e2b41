"""The tests, importable as a package, so that the ranks of a test can import its functions."""
