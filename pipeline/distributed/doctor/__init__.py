"""What is wrong with the machines of a job, before it starts: every host is asked, each answer is judged."""
