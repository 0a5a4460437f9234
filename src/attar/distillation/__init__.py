"""Distillation and recovery: a student learns a teacher's distribution."""
