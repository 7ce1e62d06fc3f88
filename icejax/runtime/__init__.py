"""Devices and their memory, compiler options, the compile cache and its clock, and reads of host memory inside a program."""
