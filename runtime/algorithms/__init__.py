"""How the ranks reduce a bucket: one file for each way, behind the interface of `base`."""
