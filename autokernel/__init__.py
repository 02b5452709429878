"""AutoKernel's shared package: operator specs, the judge, the ledger. It has no command line of its own."""

__version__ = "0.1.0"
