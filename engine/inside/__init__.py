"""What runs inside the engine's environment, by its python, which has none of our packages: only the standard library, and
inside functions what that environment holds, is imported here.
"""
