"""Regions under Dynamo."""
