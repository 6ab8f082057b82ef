"""Parts that recipes share; the loops themselves are in `backstay.recipes`."""
