"""What tests of several folders share; `pythonpath` in pyproject.toml makes it importable."""
