"""Devices and their memory, compiler options, the compile cache, and reading host memory from a program."""
