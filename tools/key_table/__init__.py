"""Reads every configuration key out of one DeepSpeed release: recorder, pydantic models, source
text.
"""
