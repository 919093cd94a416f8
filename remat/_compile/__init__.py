"""A region under Dynamo."""
