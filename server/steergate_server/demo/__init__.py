"""The bundled model, its vectors, and the demonstration program."""
