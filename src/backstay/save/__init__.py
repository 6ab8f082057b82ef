"""The way out: train state -> file image -> checkpoint. Internal; `backstay` is the API."""
