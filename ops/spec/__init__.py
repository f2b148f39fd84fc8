"""``kvfabric spec``: model specs from presets, files and Hugging Face configs."""
