"""What a step hands back: values that are still on the device, read late and never waited for."""
