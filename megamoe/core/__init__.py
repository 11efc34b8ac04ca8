"""What every room knows: exceptions, the environment, the problem, the table of formats."""
