"""The Open Inference Protocol over the same generator and validator as GenerationService."""
