"""What a service must stand: what it runs on is killed, callers crowd it, ask nonsense or never finish asking."""
