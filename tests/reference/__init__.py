"""Plain formulas and the tolerance rule, written from the papers: what the operators are compared with."""
