{{/* Which Secrets does a pod read, and where? Folders, not single files (subPath): those would never be replaced. */}}

{{- define "refill.secretsDir" -}}
/var/run/secrets/refill
{{- end }}

{{/* Of a pod's settings, those that are paths in Secrets. */}}
{{- define "refill.secretPaths" -}}
{{- $dir := include "refill.secretsDir" . -}}
{{- if .Values.access.clientTokens }}
REFILL_CLIENT_TOKENS: {{ $dir }}/client-tokens
{{- end }}
{{- if .Values.access.peerToken }}
REFILL_PEER_TOKEN: {{ $dir }}/peer-token/token
{{- end }}
{{- if .Values.tls.secret }}
REFILL_TLS_CERT: {{ $dir }}/tls/tls.crt
REFILL_TLS_KEY: {{ $dir }}/tls/tls.key
{{- end }}
{{- if .Values.tls.peerSecret }}
REFILL_PEER_TLS_CERT: {{ $dir }}/peer-tls/tls.crt
REFILL_PEER_TLS_KEY: {{ $dir }}/peer-tls/tls.key
REFILL_PEER_TLS_CA: {{ $dir }}/peer-tls/ca.crt
{{- end }}
{{- end }}

{{/* Volumes of a cache pod: name, which is its folder's too, and Secret. */}}
{{- define "refill.secrets" -}}
{{- $given := dict "client-tokens" .Values.access.clientTokens "peer-token" .Values.access.peerToken "tls" .Values.tls.secret "peer-tls" .Values.tls.peerSecret -}}
{{- range $name, $secret := $given }}
{{- if $secret }}
{{ $name }}: {{ $secret | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "refill.secretMounts" -}}
{{- range $name, $secret := include "refill.secrets" . | fromYaml }}
- name: {{ $name }}
  mountPath: {{ include "refill.secretsDir" $ }}/{{ $name }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "refill.secretVolumes" -}}
{{- range $name, $secret := include "refill.secrets" . | fromYaml }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret | quote }}
{{- end }}
{{- end }}
