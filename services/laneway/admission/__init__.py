"""The admission service: the door where requests come in and answers leave."""
