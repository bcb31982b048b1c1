"""The command line, `quire`. Each command is a module with `main(argv) -> int`, imported when it is called."""
