"""The way back: locate, verify, plan, read, reshard, restore. Internal; `backstay` is the API."""
