"""Stands for a package that is not installed; see `support.process_checks.light_environment`."""

raise ImportError(f"{__name__} is not there for the scripts of these tests")
