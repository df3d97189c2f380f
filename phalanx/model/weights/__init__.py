"""Only the boxes of parameters that are asked for, from safetensors, a module or seeded initialisation."""
