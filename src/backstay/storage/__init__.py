"""Where bytes live. Internal; `backstay` is the API."""
