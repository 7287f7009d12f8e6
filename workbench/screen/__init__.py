"""What people see in a notebook: views as HTML, figures, and the panel's parts."""
