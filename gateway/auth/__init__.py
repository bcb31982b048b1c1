"""Who may call: keys, tenants, what each key allows and how much of it."""
