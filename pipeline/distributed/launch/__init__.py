"""How a job is started on one or many machines: what launch/*.sh hand over to."""
