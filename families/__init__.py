"""Model families, one file or folder each; found through entry points."""
