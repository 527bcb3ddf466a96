"""Measuring an engine that has nothing else to do, and writing down what was found."""
