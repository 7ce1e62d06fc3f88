"""All that is to be known of a device that is lent for minutes, by one command."""
