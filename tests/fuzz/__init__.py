"""A fuzzer: random models and orders of calls, optimised and eager side by side (`python -m tests.fuzz --help`)."""
