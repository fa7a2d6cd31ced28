"""What an audit finds where faults were planted."""
