"""Define what every other package uses: exceptions, environment variables, `Problem`, the table of formats."""
